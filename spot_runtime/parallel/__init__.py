"""Process groups, the weights of a worker and where they come from. Tensors in, tensors out; never a model, a file of one, or a message."""
