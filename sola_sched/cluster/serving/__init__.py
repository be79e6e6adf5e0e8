"""The running system: a gateway before several vLLM servers, and both of them on Ray Serve.

`gateway`, and what it is made of, needs aiohttp and neither vLLM nor Ray; `load_feed` is the
servers' side of it and knows vLLM; `ray_app` and `ray_router` are the doors to Ray. It may import
`sola_sched.cluster`, the core and, in the doors, `sola_sched.vllm_adapter`.
"""
