"""TensorRT: verifier and EAGLE head as engines, and ONNX Runtime as what runs the same graphs on a CPU."""
