"""Parts of the external launcher executor."""
