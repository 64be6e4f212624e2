"""The layers that the tests import."""
