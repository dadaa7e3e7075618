"""Options that several verbs share."""

from meshwright.cli.verb import option

BATCH = option("Tokens a step (4Mi) or sequences (1024seq).")
SEQ = option("Tokens of a sequence.", "--seq", default="4096")
SEQ_NEEDED = option("Tokens of a sequence.", "--seq")
MESH = option("Mesh axes, major to minor, such as X=4,Y=2.")
DIMS = option("Sizes, such as B=1024,D=4096,F=16384.")
AXES = option("Mesh axes to keep fixed, such as fsdp=1024,tensor=4.")
SET = option("A field: strategy.remat=block.", "--set", metavar="KEY=VALUE")
CALIBRATION = option("Rates of the chip (TOML), or datasheet.")
PNG = option("Draw the figures to this file (.png or .svg).")
