"""Embeddings of a model of text, in the real application, by the client that users have."""

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.conftest import App
from wingbeat.runtime.demo import DEMO_FOLDER

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = DEMO_FOLDER / "draft_model"
TEXTS = ["def main():\n    ", "class Stack:", "x"]


def test_embeddings_are_those_of_transformers(start_app):
    tokenizer, model = AutoTokenizer.from_pretrained(SMALL), AutoModel.from_pretrained(SMALL, dtype=torch.float32)
    settings = {"model": str(SMALL), "drafter": "ngram", "embeddings": "mean", "served_model_name": "org/small"}
    with start_app("embeddings", max_model_len=256, num_kv_blocks=64, **settings) as app:
        answer = app.client.embeddings.create(model="org/small", input=TEXTS, encoding_format="float")
        for text, found in zip(TEXTS, answer.data, strict=True):
            with torch.no_grad():
                states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
            mean = states.mean(0) / states.mean(0).norm()
            np.testing.assert_allclose(found.embedding, mean.numpy(), atol=1e-4)
        by_default = app.client.embeddings.create(model="org/small", input=TEXTS)  # openai's client asks for base64
        np.testing.assert_allclose(by_default.data[0].embedding, answer.data[0].embedding, atol=1e-6)


def test_a_model_of_text_has_none_unless_it_is_asked_for_them(demo_app: App):
    with pytest.raises(openai.BadRequestError, match="is not served as an embedding model"):
        demo_app.client.embeddings.create(model="wingbeat-demo", input="x")
