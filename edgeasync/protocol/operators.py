"""The ONNX operators that a device executes. Graphs with other operators are refused."""

_NAMES = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu CenterCropPad Clip Col2Im
    Compress Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumProd CumSum DepthToSpace
    DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten
    Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater
    GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxUnpool Mean MeanVarianceNormalization Min
    Mish Mod Mul Neg NegativeLogLikelihoodLoss NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear
    RMSNormalization RNN RandomNormalLike RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    ReverseSequence RotaryEmbedding Round Scan ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
    Sinh Size Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub
    Sum Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
ALLOWED = frozenset(_NAMES.split())
"""Standard operators that compute tensors from tensors, without unbounded loops or branches.

Random operators are allowed if the shape of their output is that of another tensor. `Loop`, `If`,
and operators for sequences, text and images are excluded.
"""

_OWN_NAMES = """
    BiasGelu DynamicQuantizeMatMul FastGelu FusedMatMul Gelu MatMulIntegerToFloat MatMulNBits QuickGelu
    SkipLayerNormalization SkipSimplifiedLayerNormalization
"""
ALLOWED_OWN = frozenset(_OWN_NAMES.split())
"""Operators of onnxruntime's own domain.

They support quantized weights, or are created by onnxruntime's optimizer.
"""
