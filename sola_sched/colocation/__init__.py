"""Several engines on one GPU: turns, sleep, and a KV cache that they share.

`lease` is the turn that engines pass to each other, `arbiter` says who is next and `urgency` how
much an engine wants it. `sleeping` and `door` put services to sleep that nobody asks for.
`unified_blocks` is the paper's pool of KV blocks for models of different shapes.

Source: SeaLLM (Zhao et al.), sections 4.2, 4.4 and 5. There one process holds the models that
share a GPU; here each is an engine of its own, as vLLM has it, and turns are passed by the kernel.

May import: errors, config, proxy, cost, prediction, core.
Third party: numpy, aiohttp (cli, door).
"""
