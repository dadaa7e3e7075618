"""What the compiler made of a step, read from its HLO and held against the derived steps."""
