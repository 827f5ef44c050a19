"""Ways to start the node agent on a node, and nothing more: it dials back by itself."""
