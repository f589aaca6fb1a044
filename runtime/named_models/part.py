"""Registers short names of published models; the download code is imported on first use."""

named_model = "wingbeat.runtime.named_models.table:named_model"
meant_name = "wingbeat.runtime.named_models.table:meant_name"
folder_of = "wingbeat.runtime.named_models.fetch:folder_of"
own_head = "wingbeat.runtime.named_models.table:own_head"
gains_by_suffix = "wingbeat.runtime.named_models.table:gains_by_suffix"
