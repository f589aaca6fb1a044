"""Runtime part: test of a loaded model against transformers; imports the implementation when a model is loaded."""

model_trial = "wingbeat.runtime.model_trial.model_trial:ModelTrial"
