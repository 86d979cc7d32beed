"""Several ranks against one device: gradients, batches and speed."""
