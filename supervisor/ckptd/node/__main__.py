"""`python -m ckptd.node`: what a launcher starts on a node."""

from ckptd.node.agent import main

main()
