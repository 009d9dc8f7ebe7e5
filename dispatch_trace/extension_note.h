// What is noted of an op that has run, by the mode of its thread.
#pragma once

#include "extension_values.h"

namespace {

// As `MetaRecorder.__torch_dispatch__`, from the op's return on.
void note_shapes(PyObject* self, Way* way, PyObject* frame, const Call& call) {
  Key key(*call.info);
  auto add = [&](const at::Tensor& tensor) {
    if (!is_plain(way, class_of(tensor)) || tensor.is_nested() ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      throw Unusual{};
    }
    key.shape(tensor);
  };
  for (const c10::IValue& value : call.args) describe(key, value, add);
  for (const c10::IValue& value : call.outs) describe(key, value, add);
  Ref whole_key = key.made();
  Ref body = Ref::to(find(way->held.bodies, whole_key.get()));
  if (!body || !truth(frame, names.shares_bodies)) {
    Arguments given = in_python(call);
    body = Ref(must(PyObject_CallMethodObjArgs(self, names._new_body, whole_key.get(), frame, call.info->info.get(),
                                               given.args.get(), given.kwargs.get(), in_python(call.outs).get(),
                                               nullptr)));
  }
  Ref seq = next_seq(self, way);
  append(way, *call.info, frame, body.get(), seq.get(), Py_None, Py_None);
}

// What is not the plain case goes to the Python method that does all cases.
void note_in_python(PyObject* self, PyObject* method, PyObject* key, PyObject* frame, const Call& call) {
  Arguments given = in_python(call);
  std::vector<PyObject*> passed{self};
  Ref out = in_python(call.outs);
  if (key != nullptr) passed.push_back(key);
  for (PyObject* each : {frame, call.info->info.get(), given.args.get(), given.kwargs.get(), out.get()}) {
    passed.push_back(each);
  }
  Ref done(must(PyObject_VectorcallMethod(method, passed.data(), passed.size(), nullptr)));
}

void note(PyObject* self, Way* way, const Call& call) {
  bool ask = false;
  if (way->values) {
    if (find(way->held.here, names.busy) != Py_False) return;  // an op of the recorder's own
    ask = !truth(way->held.tracer, names.active);
  }
  Ref frame = frame_of(way, *call.info, ask);
  if (frame.get() == Py_None || !truth(frame.get(), names.records_ops)) return;
  if (way->values) {
    Ref key = note_values(self, way, frame.get(), call);
    if (key) note_in_python(self, names._record, key.get(), frame.get(), call);
    return;
  }
  try {
    note_shapes(self, way, frame.get(), call);
  } catch (const Unusual&) {
    note_in_python(self, names._note, nullptr, frame.get(), call);
  }
}

}  // namespace
