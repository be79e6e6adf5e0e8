"""Output-length prediction; each predictor is a module of its own, loaded when it is imported.

May import: errors, config, prediction.
Third party: faiss (retrieval.*), huggingface_hub, numpy, safetensors (retrieval.*), scipy,
sentence_transformers (retrieval.*), tokenizers, torch, tqdm, transformers.
"""
