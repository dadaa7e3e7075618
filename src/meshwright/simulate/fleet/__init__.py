"""Simulates a training fleet whose parts fail: the time kept and lost under several recovery policies."""
