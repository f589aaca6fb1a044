"""Request fields of other servers (vLLM, SGLang, llama.cpp)."""
