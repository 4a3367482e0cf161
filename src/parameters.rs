//! A module's parameters by name: reading them, collecting their gradients, putting new values in.
//!
//! Values are handed around flat (`[n]`), so that parameters of every rank fit one type; shapes travel beside them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, FloatDType, Gradients, Tensor};
use std::collections::BTreeMap;

/// One parameter, outside any autodiff graph.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Path in the module, as PyTorch's `state_dict` writes it: `transformer.h.0.attn.c_q.weight`.
    pub name: String,
    /// Sizes of the axes.
    pub shape: Vec<usize>,
    /// The elements in row-major order, `[n]`.
    pub value: Tensor<1>,
}

impl Parameter {
    /// How many numbers it holds.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All float parameters of `module`, in the order of its fields.
pub fn parameters<M: Module>(module: &M) -> Vec<Parameter> {
    struct Reader {
        path: Vec<String>,
        found: Vec<Parameter>,
    }
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            let shape = value.dims().to_vec();
            self.found.push(Parameter { name: self.path.join("."), shape, value: flat(value) });
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
    }
    let mut reader = Reader { path: Vec::new(), found: Vec::new() };
    module.visit(&mut reader);
    reader.found
}

/// Takes the gradient of every parameter out of `gradients`, flat and by name; parameters without one are left out.
pub fn take_gradients<M: Module>(module: &M, gradients: &mut Gradients) -> BTreeMap<String, Tensor<1>> {
    struct Collector<'a> {
        path: Vec<String>,
        gradients: &'a mut Gradients,
        found: BTreeMap<String, Tensor<1>>,
    }
    impl ModuleVisitor for Collector<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = param.val().grad_remove(self.gradients) {
                self.found.insert(self.path.join("."), flat(gradient));
            }
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
    }
    let mut collector = Collector { path: Vec::new(), gradients, found: BTreeMap::new() };
    module.visit(&mut collector);
    collector.found
}

/// Takes the gradient of the parameter `name` out of `gradients`; noughts like `value` if it has none, with a warning if `warn`.
///
/// Stands here because the editable files may not write to the log: what they write could be taken for a result.
pub fn take_gradient(
    gradients: &mut BTreeMap<String, Tensor<1>>,
    name: &str,
    value: &Tensor<1>,
    warn: bool,
) -> Tensor<1> {
    gradients.remove(name).unwrap_or_else(|| {
        if warn {
            // Escaped: a name with a line break in it must not start a line of its own.
            let name = name.escape_debug();
            tracing::warn!("parameter '{name}' got no gradient; hint: nothing in src/model.rs uses it");
        }
        value.zeros_like()
    })
}

/// `module` with the flat `values` in place of the parameters of the same names; the others stay.
///
/// # Panics
/// If a value has another number of elements than its parameter.
pub fn with_values<M: Module>(module: M, values: BTreeMap<String, Tensor<1>>) -> M {
    struct Writer {
        path: Vec<String>,
        values: BTreeMap<String, Tensor<1>>,
    }
    impl ModuleMapper for Writer {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(value) = self.values.remove(&self.path.join(".")) else { return param };
            param.map(|old| {
                let value = value.reshape(old.dims());
                if old.is_autodiff() {
                    Tensor::from_inner(value).set_require_grad(old.is_require_grad())
                } else {
                    value
                }
            })
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
    }
    module.map(&mut Writer { path: Vec::new(), values })
}

/// `module` with its float32 matrices cast to `compute_type`, once for all forward passes of a step: the products then need
/// no cast of their own. The copies are parameters in their own right; gradients come in their type.
pub fn in_compute_type<M: Module>(module: &M, compute_type: FloatDType) -> M {
    struct Caster(DType);
    impl ModuleMapper for Caster {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if D < 2 || param.dtype() != DType::F32 || self.0 == DType::F32 {
                return param;
            }
            param.map(|weight| {
                let is_trained = weight.is_require_grad();
                weight.detach().cast(self.0).detach().set_require_grad(is_trained)
            })
        }
    }
    module.clone().map(&mut Caster(compute_type.into()))
}

fn flat<const D: usize>(value: Tensor<D>) -> Tensor<1> {
    let elements = value.shape().num_elements();
    value.reshape([elements])
}
