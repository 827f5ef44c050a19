"""What does a file say that tells of interruptions: a CSV, or the output of `sacct -P`? Clean rows, and all the others."""
