"""The expert layer: its primitive, derivative, batches and division over a mesh."""
