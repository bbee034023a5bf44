import torch

# The tensors of these tests are tiny: a second thread would only wait.
torch.set_num_threads(1)
