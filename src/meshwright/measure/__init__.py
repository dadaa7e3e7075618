"""Measurements of the machine at hand, as a calibration that plans use."""
