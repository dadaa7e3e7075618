"""What every package uses: units, names of dims, labels, notation, errors, files: what every other folder may use."""
