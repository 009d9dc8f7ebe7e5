// One call of an op, with its arguments and results as the dispatcher has them: what it looks like in Python, and
// the bytes that stand for it in the search for its body.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <cstring>
#include <string>
#include <string_view>

#include "extension_way.h"

namespace {

using Values = std::vector<c10::IValue>;

struct Call {
  const c10::FunctionSchema* schema;
  const Info* info;
  Values args;  // all that the schema knows, defaults too
  c10::ArrayRef<c10::IValue> outs;
};

// None in Python.
bool is_none(const c10::IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

// A tensor in Python: a number that stands in a tensor's place is a number there.
bool is_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// The number that stands in a tensor's place; other values as they are.
c10::IValue plain_value(const c10::IValue& value) {
  if (!value.isTensor() || is_none(value) || is_tensor(value)) return value;
  const at::Tensor& number = value.toTensor();
  if (!number.is_cpu() || number.dim() != 0) throw Unusual{};
  if (number.scalar_type() == c10::kLong) return *number.const_data_ptr<int64_t>();
  if (number.scalar_type() == c10::kDouble) return *number.const_data_ptr<double>();
  if (number.scalar_type() == c10::kBool) return *number.const_data_ptr<bool>();
  throw Unusual{};
}

// Each tensor among values, also in lists; until `see` says true.
template <typename See>
bool any_tensor(c10::ArrayRef<c10::IValue> values, const See& see) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined() && see(value.toTensor())) return true;
    } else if (value.isList()) {
      for (const c10::IValue& each : value.toListRef()) {
        if (each.isTensor() && each.toTensor().defined() && see(each.toTensor())) return true;
      }
    }
  }
  return false;
}

// -- in Python ---------------------------------------------------------------------------------------------

Ref as_python(const c10::IValue& value) {
  try {
    return Ref(torch::jit::toPyObject(value).release().ptr());
  } catch (py::error_already_set& error) {
    error.restore();
    throw Raised{};
  }
}

bool is_of(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.real_type();
  if (type->kind() == kind) return true;
  auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == kind;
}

Ref argument_as_python(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isInt()) {  // how the dispatcher keeps these
    if (is_of(argument, c10::TypeKind::ScalarTypeType)) {
      auto kind = static_cast<c10::ScalarType>(value.toInt());
      return Ref::to(must(reinterpret_cast<PyObject*>(torch::getTHPDtype(kind))));
    }
    if (is_of(argument, c10::TypeKind::LayoutType)) {
      auto layout = static_cast<c10::Layout>(value.toInt());
      return Ref::to(must(reinterpret_cast<PyObject*>(torch::getTHPLayout(layout))));
    }
    if (is_of(argument, c10::TypeKind::MemoryFormatType)) {
      return Ref::to(must(torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt()))));
    }
  }
  return as_python(value);
}

struct Arguments {
  Ref args, kwargs;
};

// As a dispatch mode is given them: without defaults at the end, and without keywords that have their default.
Arguments in_python(const Call& call) {
  const auto& arguments = call.schema->arguments();
  auto is_default = [&](size_t i) {
    const auto& value = arguments[i].default_value();
    return value.has_value() && *value == call.args[i];
  };
  size_t num_positional = arguments.size();
  while (num_positional > 0 && arguments[num_positional - 1].kwarg_only()) --num_positional;
  size_t num_given = num_positional;
  while (num_given > 0 && is_default(num_given - 1)) --num_given;
  Arguments made{Ref(must(PyTuple_New(num_given))), Ref(must(PyDict_New()))};
  for (size_t i = 0; i < num_given; ++i) {
    PyTuple_SET_ITEM(made.args.get(), i, argument_as_python(arguments[i], call.args[i]).release());
  }
  for (size_t i = num_positional; i < arguments.size(); ++i) {
    if (is_default(i)) continue;
    Ref value = argument_as_python(arguments[i], call.args[i]);
    check(PyDict_SetItemString(made.kwargs.get(), arguments[i].name().c_str(), value.get()));
  }
  return made;
}

Ref in_python(c10::ArrayRef<c10::IValue> outs) {
  if (outs.empty()) return Ref::to(Py_None);
  if (outs.size() == 1) return as_python(outs[0]);
  Ref made(must(PyTuple_New(outs.size())));
  for (size_t i = 0; i < outs.size(); ++i) PyTuple_SET_ITEM(made.get(), i, as_python(outs[i]).release());
  return made;
}

// The other way: what a dispatch mode was given, as the dispatcher wants it.
Values from_python(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs) {
  torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
  Values made;
  made.reserve(schema.arguments().size());
  size_t num_args = static_cast<size_t>(PyTuple_GET_SIZE(args));
  for (const c10::Argument& argument : schema.arguments()) {
    PyObject* value = nullptr;
    if (made.size() < num_args) {
      value = PyTuple_GET_ITEM(args, made.size());
    } else if (kwargs != nullptr) {
      value = PyDict_GetItemString(kwargs, argument.name().c_str());
    }
    if (value != nullptr) {
      made.push_back(torch::jit::toIValue(value, argument.type(), argument.N()));
    } else {
      if (!argument.default_value().has_value()) throw Unusual{};
      made.push_back(*argument.default_value());
    }
  }
  return made;
}

Values from_python(const c10::FunctionSchema& schema, PyObject* out) {
  const auto& returns = schema.returns();
  Values made;
  if (returns.size() == 1) {
    made.push_back(torch::jit::toIValue(out, returns[0].type(), returns[0].N()));
  } else {
    for (size_t i = 0; i < returns.size(); ++i) {
      made.push_back(torch::jit::toIValue(PyTuple_GET_ITEM(out, i), returns[i].type(), returns[i].N()));
    }
  }
  return made;
}

// -- what stands for it ------------------------------------------------------------------------------------

// Bytes: equal only where a record shows the same. The op says the type of each argument, so that whatever types
// leave open needs a mark. What stands in it by its address is kept by the tracer.
class Key {
 public:
  explicit Key(const Info& info) {
    bytes_.reserve(512);
    word(reinterpret_cast<int64_t>(info.info.get()));
  }

  void mark(char kind) { bytes_.push_back(kind); }
  void word(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(std::string_view value) {
    word(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  void words(c10::IntArrayRef values) {
    word(static_cast<int64_t>(values.size()));
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  }
  void number(double value) {  // by its bits: 0.0 equals -0.0
    int64_t bits;
    static_assert(sizeof bits == sizeof value);
    std::memcpy(&bits, &value, sizeof bits);
    word(bits);
  }
  // A tensor by what a record without values says of it.
  void shape(const at::Tensor& tensor) {
    mark('t');
    mark(static_cast<char>(tensor.scalar_type()));
    words(tensor.sizes());
  }
  // A tensor by what a record with values says of it.
  void geometry(const at::Tensor& tensor) {
    shape(tensor);
    words(tensor.strides());
    word(tensor.storage_offset());
  }
  Ref made() const { return Ref(must(PyBytes_FromStringAndSize(bytes_.data(), bytes_.size()))); }

 private:
  std::string bytes_;
};

// Adds what stands for a value; `tensor` does for each tensor.
template <typename OfTensor>
void describe(Key& key, const c10::IValue& value, const OfTensor& of_tensor) {
  if (is_none(value)) return key.mark('n');
  if (is_tensor(value)) return of_tensor(value.toTensor());
  if (value.isTensor()) return describe(key, plain_value(value), of_tensor);
  if (value.isInt()) return key.mark('i'), key.word(value.toInt());
  if (value.isDouble()) return key.mark('d'), key.number(value.toDouble());
  if (value.isBool()) return key.mark(value.toBool() ? 'y' : 'f');
  if (value.isString()) return key.mark('s'), key.text(value.toStringRef());
  if (value.isDevice()) return key.mark('v'), key.text(value.toDevice().str());
  if (!value.isList()) throw Unusual{};
  auto values = value.toListRef();
  key.mark('l');
  key.word(static_cast<int64_t>(values.size()));
  for (const c10::IValue& each : values) describe(key, each, of_tensor);
}

}  // namespace
