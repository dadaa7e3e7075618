"""Measures the devices at hand: rates, knees, a calibration."""
