"""Expert blocks for the frameworks that models are written in.

A block has a router, experts, a shared expert if there is one, and the losses that keep experts
balanced. `MoEConfig` says which; `jaxmoe.nn.linen`, `jaxmoe.nn.nnx` and `jaxmoe.nn.equinox` each
have a module `MoE` of it, with the same parameters by the same names. Nothing here is imported by
`import jaxmoe`, and each module needs its own framework alone.
"""

from .block import Aux as Aux
from .block import MoEConfig as MoEConfig
from .block import Parameter as Parameter
from .block import apply as apply
from .block import init as init
from .block import parameters as parameters
