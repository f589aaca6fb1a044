"""Layers of a verifier on the fake GPU, for tests of every kind."""

from wingbeat.runtime.fused.layers import OPS, fuse
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def fused(loaded: LoadedModel) -> None:
    fuse(loaded.model, loaded.decoder_layers, loaded.layers, OPS["cuda"])


PREPARED_FOR_GPU = {"fused": fused}
