"""What `import meshwright as mw` offers and the verbs of the command line call: plans, proofs and runs by name."""
