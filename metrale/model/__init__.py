"""The model: config.json to `ModelConfig`, checkpoint to tensors, the hybrid decoder and its MTP head."""
