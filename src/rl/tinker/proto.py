"""The Protobuf messages of the Tinker API that this server reads and writes, by the names and
numbers of their fields (tinker 0.38).

Fields that we do not know are skipped, as Protobuf does.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
# made when it is imported, so that type checkers do not see it
F: Any = getattr(descriptor_pb2, "FieldDescriptorProto")  # noqa: B009
MESSAGES = {
    "Tensor": ("1 dense? bytes", "2 sparse_csr? SparseCsr", "3 dtype int32", "4 shape* int64"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "EncodedText": ("1 tokens bytes",),
    "Other": (),
    "Chunk": ("1 encoded_text? EncodedText", "2 image? Other", "3 dmel? Other"),
    "Entry": ("1 key string", "2 value Tensor"),
    "Value": ("1 number? double", "2 text? string"),
    "ConfigEntry": ("1 key string", "2 value float"),
    "ConfigEntryV2": ("1 key string", "2 value Value"),
    "MetricEntry": ("1 key string", "2 value double"),
    "Datum": ("1 model_input* Chunk", "2 loss_fn_inputs* Entry"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data* Datum",
        "4 loss_fn string",
        "5 loss_fn_config* ConfigEntry",
        "6 forward_only bool",
        "7 loss_fn_config_v2* ConfigEntryV2",
    ),
    "BatchedTensor": (
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype int32",
        "4 trailing_shape* int64",
    ),
    "FieldEntry": ("1 key string", "2 value BatchedTensor"),
    "ArrayRecord": ("1 type_tag string", "2 fields* FieldEntry", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs* ArrayRecord",
        "3 metrics* MetricEntry",
    ),
    "SampledSequence": ("1 stop_reason int32", "2 tokens bytes", "3 logprobs bytes"),
    "SampleResponse": ("1 sequences* SampledSequence", "2 prompt_logprobs? bytes"),
}
"""Message -> its fields: number, name (`*`: repeated, `?`: may be absent) and type. An entry of
a map is a message; an enumeration is a number."""
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Values of `dtype`."""
STOP, LENGTH = 0, 1
"""Values of `stop_reason`."""


def classes() -> dict[str, Any]:
    """Returns the class of each message."""
    file = getattr(descriptor_pb2, "FileDescriptorProto")(  # noqa: B009
        name="rl/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (text.split() for text in fields):
            repeated, optional = field.endswith("*"), field.endswith("?")
            added = message.field.add(
                name=field.rstrip("*?"),
                number=int(number),
                label=F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL,
            )
            if kind in MESSAGES:
                added.type, added.type_name = F.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
                continue
            added.type = getattr(F, f"TYPE_{kind.upper()}")
            if optional:
                added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{added.name}")
    pool: Any = descriptor_pool.DescriptorPool()  # ty: ignore[possibly-missing-implicit-call]
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


MESSAGE = classes()
