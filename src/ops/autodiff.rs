//! The operations under autodiff: each is one node of the graph with a hand-written backward.

use super::{AttentionState, FusedOps, Kernels, MixState, portable};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, binary, unary};
use burn::backend::tensor::{FloatTensor, IntTensor};

impl<B: Kernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn embed(weight: FloatTensor<Self>, tokens: IntTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Embedding;
        impl<B: Kernels> Backward<B, 1> for Embedding {
            type State = (FloatTensor<B>, IntTensor<B>);
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let (weight, tokens) = ops.state;
                unary::<B, _>(ops.parents, ops.node, grads, |grad| B::embed_backward(weight, tokens, grad));
            }
        }
        let (weight, node) = weight.into_parts();
        match Embedding.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((weight.clone(), tokens.clone()), B::embed(weight, tokens)),
            OpsKind::UnTracked(prep) => prep.finish(B::embed(weight, tokens)),
        }
    }

    fn rms_norm(x: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct RmsNorm;
        impl<B: Kernels> Backward<B, 1> for RmsNorm {
            type State = B::RmsNormState;
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                unary::<B, _>(ops.parents, ops.node, grads, |grad| B::rms_norm_backward(ops.state, grad));
            }
        }
        let (x, node) = x.into_parts();
        match RmsNorm.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, state) = B::rms_norm_forward(x);
                prep.finish(state, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rms_norm(x)),
        }
    }

    fn upload(place: IntTensor<Self>, numbers: Vec<i64>) -> IntTensor<Self> {
        B::upload(place, numbers)
    }

    fn rotary(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Rotary;
        impl<B: Kernels> Backward<B, 1> for Rotary {
            type State = (FloatTensor<B>, FloatTensor<B>);
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let (cos, sin) = ops.state;
                // A rotation's gradient is the rotation by the opposite angle.
                unary::<B, _>(ops.parents, ops.node, grads, |grad| B::rotary(grad, cos, B::float_neg(sin)));
            }
        }
        let (x, node) = x.into_parts();
        // The angles are constants: no gradient flows to them.
        let ((cos, _), (sin, _)) = (cos.into_parts(), sin.into_parts());
        match Rotary.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((cos.clone(), sin.clone()), B::rotary(x, cos, sin)),
            OpsKind::UnTracked(prep) => prep.finish(B::rotary(x, cos, sin)),
        }
    }

    fn rotary_rms_norm(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct RotaryRmsNorm;
        impl<B: Kernels> Backward<B, 1> for RotaryRmsNorm {
            type State = (B::RmsNormState, FloatTensor<B>, FloatTensor<B>);
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let (norm, cos, sin) = ops.state;
                let backward = |grad| B::rotary_rms_norm_backward(norm, cos, sin, grad);
                unary::<B, _>(ops.parents, ops.node, grads, backward);
            }
        }
        let (x, node) = x.into_parts();
        // The angles are constants: no gradient flows to them.
        let ((cos, _), (sin, _)) = (cos.into_parts(), sin.into_parts());
        match RotaryRmsNorm.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, norm) = B::rotary_rms_norm_forward(x, cos.clone(), sin.clone());
                prep.finish((norm, cos, sin), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rotary_rms_norm(x, cos, sin)),
        }
    }

    fn project(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Project;
        impl<B: Kernels> Backward<B, 2> for Project {
            type State = [FloatTensor<B>; 2];
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let [x, weight] = ops.state;
                let grad = grads.consume::<B>(&ops.node);
                let gradients = B::project_backward(x, weight, grad);
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(node) = parent {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }
        let ((x, nx), (weight, nw)) = (x.into_parts(), weight.into_parts());
        match Project.prepare::<C>([nx, nw]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish([x.clone(), weight.clone()], B::project(x, weight)),
            OpsKind::UnTracked(prep) => prep.finish(B::project(x, weight)),
        }
    }

    fn mix(
        x: FloatTensor<Self>,
        x_scale: FloatTensor<Self>,
        y: FloatTensor<Self>,
        y_scale: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Mix;
        impl<B: Kernels> Backward<B, 4> for Mix {
            type State = MixState<B>;
            fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
                let grad = grads.consume::<B>(&ops.node);
                let gradients = B::mix_backward(ops.state, grad);
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(node) = parent {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }
        let ((x, nx), (x_scale, nxs)) = (x.into_parts(), x_scale.into_parts());
        let ((y, ny), (y_scale, nys)) = (y.into_parts(), y_scale.into_parts());
        match Mix.prepare::<C>([nx, nxs, ny, nys]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::mix(x.clone(), x_scale.clone(), y.clone(), y_scale.clone());
                prep.finish(MixState { x, x_scale, y, y_scale }, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::mix(x, x_scale, y, y_scale)),
        }
    }

    fn gated_add(x: FloatTensor<Self>, gate: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct GatedAdd;
        impl<B: Kernels> Backward<B, 3> for GatedAdd {
            type State = [FloatTensor<B>; 2];
            fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
                let [gate, y] = ops.state;
                let grad = grads.consume::<B>(&ops.node);
                let [dgate, dy] = B::gated_add_backward(gate, y, grad.clone());
                for (parent, gradient) in ops.parents.into_iter().zip([grad, dgate, dy]) {
                    if let Some(node) = parent {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }
        let ((x, nx), (gate, ng), (y, ny)) = (x.into_parts(), gate.into_parts(), y.into_parts());
        match GatedAdd.prepare::<C>([nx, ng, ny]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish([gate.clone(), y.clone()], B::gated_add(x, gate, y)),
            OpsKind::UnTracked(prep) => prep.finish(B::gated_add(x, gate, y)),
        }
    }

    fn squared_relu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SquaredRelu;
        impl<B: Kernels> Backward<B, 1> for SquaredRelu {
            type State = FloatTensor<B>;
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                unary::<B, _>(ops.parents, ops.node, grads, |grad| B::squared_relu_backward(ops.state, grad));
            }
        }
        let (x, node) = x.into_parts();
        match SquaredRelu.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::squared_relu(x);
                prep.finish(out.clone(), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::squared_relu(x)),
        }
    }

    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        window: usize,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct CausalAttention;
        impl<B: Kernels> Backward<B, 3> for CausalAttention {
            type State = AttentionState<B>;
            fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
                let grad = grads.consume::<B>(&ops.node);
                let gradients = B::attention_backward(ops.state, grad);
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(node) = parent {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }
        let ((q, nq), (k, nk), (v, nv)) = (q.into_parts(), k.into_parts(), v.into_parts());
        match CausalAttention.prepare::<C>([nq, nk, nv]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, log_sum_exp) = B::attention_forward(q.clone(), k.clone(), v.clone(), window);
                prep.finish(AttentionState { q, k, v, out: out.clone(), log_sum_exp, window }, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::causal_attention(q, k, v, window)),
        }
    }

    fn softcap_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: f64,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SoftcapCrossEntropy;
        impl<B: Kernels> Backward<B, 2> for SoftcapCrossEntropy {
            type State = [FloatTensor<B>; 2];
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let [hidden, weight] = ops.state;
                binary::<B, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| portable::scale_by::<B>(hidden, grad),
                    |grad| portable::scale_by::<B>(weight, grad),
                );
            }
        }
        let ((hidden, nh), (weight, nw)) = (hidden.into_parts(), weight.into_parts());
        match SoftcapCrossEntropy.prepare::<C>([nh, nw]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (loss, gradients) = B::softcap_cross_entropy_gradients(hidden, weight, targets, cap);
                prep.finish(gradients, loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::softcap_cross_entropy(hidden, weight, targets, cap)),
        }
    }
}
