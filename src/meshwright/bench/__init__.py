"""Measures the devices of this machine: rates of products, memory and collectives, as a report and a calibration."""
