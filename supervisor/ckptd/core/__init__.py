"""The pure core: no I/O, no clock, no torch. Folds over one event log, and the formulas they use."""
