"""A device without hardware under the real device code: what torch.cuda and torch.npu offer.

`surfaces` has modules with the names of torch's, `dispatch` takes torch's operations on device
tensors, and `device` queues both on the simulated device's streams. The backends under test are
the shipped classes; only the module that they drive is another.
"""
