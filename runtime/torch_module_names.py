"""Modules that a trimmed `import torch` runs, in torch 2.11.0 and 2.13.0: what is worth reading ahead.

Only a hint. A name that a version lacks is passed over, a module that is not listed is read when it is imported.
`python -m scripts.bench.import_torch --names` prints the list of the installed torch.
"""

MODULE_NAMES = tuple(
    """
typing_extensions torch._utils torch._strobelight torch._strobelight.cli_function_profiler
torch._strobelight.compile_time_profiler torch._utils_internal torch._vendor torch._vendor.packaging
torch._vendor.packaging._structures torch._vendor.packaging.version torch.version torch.torch_version
numpy.version numpy._expired_attrs_2_0 numpy._utils._convertions numpy._utils numpy._globals
numpy._distributor_init numpy.exceptions numpy._core._exceptions numpy._core.printoptions numpy.dtypes
numpy._utils._inspect numpy._core.overrides numpy._core.multiarray numpy._core.umath numpy._core._dtype
numpy._core._string_helpers numpy._core._type_aliases numpy._core.numerictypes numpy._core._methods
numpy._core.fromnumeric numpy._core.shape_base numpy._core._ufunc_config numpy._core._asarray
numpy._core.arrayprint numpy._core.numeric numpy._core.einsumfunc numpy._core.function_base
numpy._core.getlimits numpy._core.memmap numpy._core.records numpy._core._add_newdocs
numpy._core._add_newdocs_scalars numpy._core._dtype_ctypes numpy._core._internal numpy._pytesttester
numpy._core numpy.__config__ numpy._typing._nbit_base numpy._typing._nested_sequence numpy._typing._shape
numpy._typing._array_like numpy._typing._char_codes numpy._typing._dtype_like numpy._typing._nbit
numpy._typing._scalars numpy._typing._ufunc numpy._typing numpy.lib._stride_tricks_impl
numpy.lib._twodim_base_impl numpy.lib._array_utils_impl numpy.lib.array_utils numpy.linalg._linalg
numpy.linalg numpy.matrixlib.defmatrix numpy.matrixlib numpy.lib._histograms_impl
numpy.lib._function_base_impl numpy.lib._index_tricks_impl numpy.lib._arraypad_impl
numpy.lib._arraysetops_impl numpy.lib._arrayterator_impl numpy.lib._nanfunctions_impl numpy.lib._utils_impl
numpy.lib._format_impl numpy.lib.format numpy.lib._datasource numpy.lib._iotools numpy.lib._npyio_impl
numpy.lib._ufunclike_impl numpy.lib._type_check_impl numpy.lib._polynomial_impl numpy.lib._shape_base_impl
numpy.lib._version numpy.lib.introspect numpy.lib.mixins numpy.lib.npyio numpy.lib._scimath_impl
numpy.lib.scimath numpy.lib.stride_tricks numpy.lib numpy._array_api_info numpy torch._namedtensor_internals
torch.overrides torch._tensor torch.types torch.storage torch.amp.autocast_mode torch.amp.grad_scaler
torch.amp torch.random torch._weights_only_unpickler torch._sources torch.serialization torch._tensor_str
torch.cuda._device_limits torch.cuda.gds torch.cuda._utils torch.cuda.graphs torch.cuda.green_contexts
torch.cuda.streams torch.cuda._memory_viz torch.cuda.memory torch.cuda.random torch.cuda.amp.autocast_mode
torch.cuda.amp.common torch.cuda.amp.grad_scaler torch.cuda.amp torch.cuda.jiterator torch.cuda.nvtx
torch.cuda.profiler torch.cuda.sparse torch.cuda.tunable torch.cuda
torch.sparse._semi_structured_conversions torch.sparse._semi_structured_ops torch.sparse.semi_structured
torch.sparse torch._compile torch.nn.parameter torch._prims_common torch.utils.backcompat
torch.utils.collect_env torch.utils.deterministic torch.utils.hooks torch.utils.backend_registration
torch.utils.cpp_backtrace torch.utils.throughput_benchmark torch.utils torchgen torchgen.code_template
torchgen.utils torchgen.model torch.utils._python_dispatch torch.nn.modules.module
torch.distributed._pycute.typing torch.distributed._pycute.int_tuple torch.distributed._pycute.layout
torch.distributed._pycute torch.distributed._mesh_layout torch.utils._typing_utils
torch.utils._config_module torch.distributed.config torch.monitor torch.distributed.logging_handlers
torch.distributed.c10d_logger torch.distributed.constants torch.distributed.rendezvous
torch.distributed.distributed_c10d torch.distributed.device_mesh torch.distributed.remote_device
torch.distributed torch.distributed.autograd torch.futures torch.distributed.rpc._utils
torch.distributed.rpc.constants torch.distributed.rpc.internal torch.distributed.rpc.api
torch.distributed.rpc.backend_registry torch.distributed.rpc.functions torch.distributed.rpc.options
torch._functorch torch.utils._contextlib torch.autograd.grad_mode torch.autograd.forward_ad
torch._functorch.pyfunctorch torch._ops torch._library.utils torch._library.autograd
torch._library.fake_impl torch._library.effects torch._library.simple_registry
torch._library.fake_class_registry torch.utils._exposed_in torch._library.custom_ops torch._opaque_base
torch._library.opaque_object torch._library.infer_schema torch._library.triton torch._library
torch.utils._pytree torch._vmap_internals torch.autograd.functional torch.autograd.variable
torch.autograd.graph torch.autograd.anomaly_mode torch._functorch.utils torch._functorch.predispatch
torch._functorch.vmap torch._functorch.apis torch._functorch.autograd_function torch.autograd.function
torch.testing._utils torch.testing._comparison torch.testing._creation torch.testing
torch.autograd.gradcheck torch.autograd.profiler_util torch.autograd.profiler torch.autograd
torch.autograd.profiler_legacy torch.distributed.rpc.server_process_global_profiler torch.distributed.rpc
torch.package._digraph torch.package._importlib torch.package._mangling torch.package.importer
torch.package._package_pickler torch.package._stdlib torch.package.find_file_dependencies
torch.package.glob_group torch.package.package_exporter
torch.package.analyze.find_first_use_of_broken_modules torch.package.analyze.trace_dependencies
torch.package.analyze torch.package.analyze.is_from_package torch.package.file_structure_representation
torch.package._directory_reader torch.package._package_unpickler torch.package.package_importer
torch.package torch._awaits torch._jit_internal torch._torch_docs torch.nn._reduction torch.nn.modules.utils
torch.nn.grad torch.nn.functional torch.nn.init torch.nn.modules.lazy torch.nn.modules.linear
torch.nn.modules.activation torch.nn.modules.container torch.nn.modules.adaptive torch.nn.modules._functions
torch.nn.modules.batchnorm torch.nn.modules.channelshuffle torch.nn.common_types torch.nn.modules.conv
torch.nn.modules.distance torch.nn.modules.dropout torch.nn.modules.flatten torch.nn.modules.fold
torch.nn.modules.instancenorm torch.nn.modules.loss torch.nn.modules.normalization torch.nn.modules.padding
torch.nn.modules.pixelshuffle torch.nn.modules.pooling torch.__future__ torch.nn.utils.parametrize
torch.nn.utils.parametrizations torch.nn.utils.rnn torch.nn.utils._named_member_accessor
torch.nn.utils.stateless torch.utils._foreach_utils torch.nn.utils.clip_grad
torch.nn.utils.convert_parameters torch.nn.utils.fusion torch.nn.utils.init torch.nn.utils.memory_format
torch.nn.utils.spectral_norm torch.nn.utils.weight_norm torch.nn.utils torch.nn.modules.rnn
torch.nn.modules.sparse torch.nn.modules.transformer torch.nn.modules.upsampling torch.nn.modules
torch.backends.cpu torch.backends.cuda torch.backends.cusparselt torch.backends.kleidiai torch.backends.mha
torch.backends.mkl torch.library torch.backends.mps torch.backends.nnpack torch.backends.openmp
torch.nn.attention._registry torch.nn.attention._fa3 torch.nn.attention._fa4 torch.nn.attention
torch.nn.parallel.parallel_apply torch.cuda.nccl torch.nn.parallel.comm torch.nn.parallel.replicate
torch.nn.parallel._functions torch.nn.parallel.scatter_gather torch.nn.parallel.data_parallel
torch.distributed.algorithms.join torch.distributed.algorithms torch.distributed.utils
torch.nn.parallel.distributed torch.nn.parallel torch.nn torch._linalg_utils torch._lowrank torch.functional
torch.__config__ torch.accelerator._utils torch.accelerator.memory torch.accelerator
torch.cpu.amp.autocast_mode torch.cpu.amp.grad_scaler torch.cpu.amp torch.cpu torch.fft tqdm._monitor
tqdm._tqdm_pandas tqdm.utils tqdm.std tqdm.version tqdm.cli tqdm.gui tqdm torch.hub torch.jit._builtins
torch.jit._async torch.jit._await torch.jit._decomposition_utils torch._classes torch.jit._fuser
torch.jit._monkeytype_config torch.jit._check torch.jit._state torch.jit.annotations
torch.jit._dataclass_impls torch.jit.frontend torch.jit._recursive torch.jit._serialization
torch.jit._script torch.jit._freeze torch.jit._ir_utils torch.jit._trace torch.jit torch.linalg
torch.mps.profiler torch.mps.event torch.mps torch._environment torch.mtia._utils torch.mtia.memory
torch.mtia.mtia_graph torch.mtia torch.multiprocessing.reductions torch.multiprocessing.spawn
torch.multiprocessing torch.nested._internal torch.fx._compatibility torch.fx.immutable_collections
torch.fx.experimental torch.fx.experimental._config torch.utils._dtype_abbrs torch.return_types
torch.fx._pytree torch.fx.operator_schemas torch.fx.node torch.fx.graph torch.fx.graph_module
torch.fx._lazy_graph_module torch.fx.traceback torch._logging.structured torch.utils._ordered_set
torch.utils._traceback torch.utils.weak torch._guards torch._logging._internal torch._logging._registrations
torch._logging torch.fx.proxy torch.fx._symbolic_trace torch.fx.config torch.fx.interpreter
torch.fx.subgraph_rewriter torch.fx torch.fx.experimental._constant_symnode
torch.nested._internal.nested_int torch.nested._internal.nested_tensor torch.nested torch.optim.optimizer
torch.optim.lr_scheduler torch.optim.swa_utils torch.optim._adafactor torch.optim._muon torch.optim.adadelta
torch.optim.adagrad torch.optim.adam torch.optim.adamax torch.optim.adamw torch.optim.asgd torch.optim.lbfgs
torch.optim.nadam torch.optim.radam torch.optim.rmsprop torch.optim.rprop torch.optim.sgd
torch.optim._functional torch.optim.sparse_adam torch.optim torch.profiler._utils
torch.profiler._memory_profiler torch.profiler.profiler torch.profiler.itt torch.profiler torch.special
torch.xpu._utils torch.xpu.graphs torch.xpu.streams torch.xpu.memory torch.xpu.random torch.xpu torch.signal
torch.ao torch._size_docs torch._storage_docs torch._tensor_docs torch.multiprocessing._atfork torch._lobpcg
torch.utils.dlpack torch._functorch.batch_norm_replacement torch._library.fake_profile torch._dispatch
torch._dispatch.python torch.utils._mode_utils torch._subclasses.meta_utils torch.utils._stats
torch.fx.experimental.sym_node torch._subclasses._fake_tensor_utils torch._custom_op
torch._subclasses.fake_impls torch._subclasses.fake_tensor torch._subclasses.fake_utils torch._subclasses
torch._subclasses.functional_tensor torch.fx.passes.shape_prop torch.fx.passes.graph_drawer
torch.fx.passes.graph_manipulation torch.fx.passes.utils.matcher_utils torch.fx.passes.utils.common
torch.fx.passes.utils torch.fx.passes.tools_common torch.fx.passes.split_utils torch.fx.passes.net_min_base
torch.fx.passes.operator_support torch.fx.passes.param_fetch torch.fx.passes.regional_inductor
torch.fx.passes.reinplace torch.fx._utils torch.utils._thunk torch.fx.experimental._backward_state
torch.fx.experimental.proxy_tensor torch.fx.passes.runtime_assert torch.fx.passes.split_module
torch.fx.passes.splitter_base torch.fx.passes torch.fx.experimental.const_fold
torch._functorch.eager_transforms torch._functorch.functional_call torch.func torch._higher_order_ops.schema
torch._higher_order_ops.utils torch._higher_order_ops.auto_functionalize torch._higher_order_ops.base_hop
torch._higher_order_ops._invoke_quant torch._higher_order_ops.aoti_call_delegate
torch._higher_order_ops.associative_scan torch._higher_order_ops.cond torch._higher_order_ops.flat_apply
torch._higher_order_ops.invoke_leaf_function torch._higher_order_ops.print torch._functorch._aot_autograd
torch._functorch._aot_autograd.utils torch._higher_order_ops.torchbind torch._higher_order_ops.effects
torch._higher_order_ops.executorch_call_delegate torch.testing._internal
torch.testing._internal.logging_tensor torch.utils.checkpoint torch._higher_order_ops.flex_attention
torch._higher_order_ops.foreach_map torch._higher_order_ops.hints_wrap torch.utils._debug_mode
torch._higher_order_ops.invoke_subgraph torch._higher_order_ops.local_map torch._higher_order_ops.map
torch._higher_order_ops.out_dtype torch._higher_order_ops.run_const_graph
torch._higher_order_ops.partitioner torch._higher_order_ops.scan torch._higher_order_ops.strict_mode
torch._higher_order_ops.while_loop torch._higher_order_ops.wrap torch._higher_order_ops
torch.compiler.config torch.compiler torch torch.nn.modules.linear_cross_entropy_options
torch.accelerator.graphs torch.utils._inspect torch.fx.experimental.unification.multipledispatch.utils
torch.fx.experimental.unification.multipledispatch.variadic
torch.fx.experimental.unification.multipledispatch.conflict
torch.fx.experimental.unification.multipledispatch.dispatcher
torch.fx.experimental.unification.multipledispatch.core torch.fx.experimental.unification.multipledispatch
torch.fx.experimental.unification.dispatch torch.fx.experimental.unification.unification_tools
torch.fx.experimental.unification.utils torch.fx.experimental.unification.variable
torch.fx.experimental.unification.core torch.fx.experimental.unification.more
torch.fx.experimental.unification torch.fx.tensor_type torch.optim._stateless torch._functorch.einops
torch._higher_order_ops.inline_asm_elementwise torch.utils._debug_mode._utils torch.utils._debug_mode._calls
torch.utils._debug_mode._mode torch.utils._appending_byte_serializer torch.compiler._cache
torch._native.common_utils torch._native.registry torch._native.dsl_registry torch._native.cutedsl_utils
torch._native.triton_utils torch._native.ops.bmm_outer_product.triton_impl
torch._native.ops.bmm_outer_product torch._native.ops.foreach_mm.impl torch._native.ops.foreach_mm
torch._native.ops.norm.rmsnorm_impl torch._native.ops.norm torch._tensor_iterator
torch._native.ops.scatter_add.cutedsl_impl torch._native.ops.scatter_add torch._native.ops.topk._common
torch._native.ops.topk.cutedsl_impl torch._native.ops.topk torch._native.ops torch._native
""".split()  # noqa: SIM905 (one name a line would be 550 lines)
)
