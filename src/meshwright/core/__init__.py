"""Units, names of dims, labels, notation, errors and files, which every other package may use."""
