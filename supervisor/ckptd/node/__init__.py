"""The node agent: one process a machine, which carries the workers of an attempt and outlives the daemon."""
