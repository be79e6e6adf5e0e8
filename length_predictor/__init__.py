"""Output-length prediction; each predictor is a module of its own, loaded when it is imported.

May import: errors, config, prediction.
Third party: faiss (index), huggingface_hub, numpy, safetensors (embed), scipy,
sentence_transformers (embed), tokenizers, torch, tqdm, transformers.
"""
