"""A pretended accelerator: whole jobs with real values on a CPU, while their tensors say that they are on `cuda:0`.

    record = install()  # in a forked process, for which there is no way back

- `places`: memory carries the device that it would be on.
- `rules`: each operator of the forward and the backward pass gets the tensors that CUDA would accept, or a fault.
- `streams`: each stream has a vector clock; what reads memory that another stream writes must have waited for it.
- `groups`: a collective gets tensors of the device that its group's back end serves.
- `cuda`: what Python code asks of torch.cuda and of a tensor.
- `vllm`: an engine that sleeps, wakes and answers by vLLM's rules.
- `engines`: engines whose log-probabilities are taken again.
- `record`: faults, and where the host waited for the device.
"""

from tests.pretended.cuda import install as install
from tests.pretended.record import Fault as Fault
from tests.pretended.record import Record as Record
