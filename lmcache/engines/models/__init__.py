"""What is known of models before anybody starts them: their layers, and how an engine sorts these into KV groups.

Behind `lmcache geometry`. No engine is imported here, and nothing is computed but sizes. Serving never asks this table:
a running engine says itself what it has, and that is what counts.

    source.py       a Hugging Face `config.json`, and what to say when it is not one
    layers.py       one frozen value for each kind of layer: what a block of it holds
    attention.py    models whose layers keep keys and values
    latent.py       models whose layers keep one latent vector a token (MLA), with or without an indexer
    recurrent.py    models with layers that keep a state
    table.py        architecture → layers
    grouping.py     how vLLM sorts layers into KV groups, without vLLM
    describe.py     both put together

The numbers are those of vLLM 0.32 on Hopper GPUs. Where vLLM is installed, `lmcache.engines.vllm.model_groups` has
vLLM's own code do the sorting; a test compares the two, group by group, for every architecture.
"""
