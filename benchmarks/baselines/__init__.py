"""Other implementations of the layer to measure against: one file each."""
