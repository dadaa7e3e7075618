"""Pictures made of cells: shardings, rings, systolic arrays, tilings, graphs of compiled programs."""
