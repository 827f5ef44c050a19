"""ckptd: a supervisor for long training jobs. `import ckptd` never imports torch."""

__version__ = "0.1.0"
