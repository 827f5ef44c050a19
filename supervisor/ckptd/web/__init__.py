"""What the daemon shows over HTTP: metrics, the status document, and whether it is well."""
