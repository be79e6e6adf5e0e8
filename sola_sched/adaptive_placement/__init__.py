"""Services on Ray Serve whose placement follows their load.

`python -m sola_sched.adaptive_placement` runs it.

`follow` is the loop: what is deployed, what has come, what `cluster.sharing.controller` decides,
and the steps in which nothing is lost. `serve_api` is Serve's REST interface, `observe` reads the
gateways and engines.

Source: SeaLLM (Zhao et al.), sections 3, 4.3 and 5. Weights are loaded by the engines that start;
the paper's node workers pull them beforehand.

May import: errors, config, core, cluster, simulator, plan, bench.
Third party: numpy, aiohttp (observe), prometheus_client (observe).
"""
