"""The fixture `call` for the tests of the verbs."""

from tests.calls import call

__all__ = ["call"]
