"""Hooks of the channel through GPU memory and of lent weights; their modules are imported only when needed."""

try_device_channel = "wingbeat.cluster.channels.cuda.ipc_trial:try_cuda_ipc"
device_channel = "wingbeat.cluster.channels.cuda.cuda_ipc:CudaIpcChannel"
lend = "wingbeat.deployments.gpu_memory.lent_weights:loan_of"
borrow = "wingbeat.deployments.gpu_memory.lent_weights:borrow"
pair_channel = "wingbeat.deployments.gpu_memory.gpu_channel:pair_channel"
drafter_supervisor = "wingbeat.deployments.gpu_memory.taking_in:drafter_supervisor"
