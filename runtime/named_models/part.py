"""Short names of published models; imports what fetches them where one is named."""

named_model = "wingbeat.runtime.named_models.table:named_model"
folder_of = "wingbeat.runtime.named_models.fetch:folder_of"
own_head = "wingbeat.runtime.named_models.table:own_head"
