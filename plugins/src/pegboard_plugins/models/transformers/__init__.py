"""The model backend that runs models of transformers."""
