"""The running system: a gateway before several vLLM servers, and both of them on Ray Serve.

`gateway` is made of `proxy`'s parts; `answering` is what its client gets, and `resuming` continues
the stream of a replica that is gone.
`ray_app` and `ray_router` are the doors to Ray Serve, `engine` is vLLM's own server inside a
replica.

May import: errors, config, cost, prediction, core, proxy, reports, length_predictor, cluster.
Third party: aiohttp, msgspec, multidict, numpy, prometheus_client, pydantic (ray_app),
ray (cli, ray_*), uvicorn (engine), vllm (engine).
"""
