use autoresearch::{config::Profile, model::*, optim::*, parameters::*};
use burn::tensor::*;
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn main() {
    if std::env::args().len() > 1 {
        let goldens = autoresearch::verify::Goldens {
            folder: std::env::args().nth(1).unwrap().into(),
            corpus: None,
            device: burn::tensor::Device::flex(),
        };
        goldens
            .verify(
                |c| {
                    if !c.passed() || std::env::var("V").is_ok() {
                        println!("{} {} {:.2e} {:.0e} {}", c.case, c.quantity, c.error, c.tolerance, c.passed())
                    }
                },
                |c| println!("left out {c}"),
            )
            .unwrap();
        return;
    }
    let device = Device::flex().autodiff();
    let hp = Hyperparameters::for_profile(Profile::Cpu);
    let config = hp.architecture(256, 1024);
    let mut model = Gpt::new(&config, FloatDType::F32, 1, &device);
    let mut opt = MuonAdamW::new(&model, &hp.parameter_groups(&model), FloatDType::F32).unwrap();
    for step in 0..12 {
        let data: Vec<i32> = (0..8 * 256).map(|i| (i * 7919 + step * 31) % 1024).collect();
        let x = Tensor::<2, Int>::from_data(TensorData::new(data, [8, 256]), &device);
        let t0 = std::time::Instant::now();
        let loss = model.loss(x.clone(), x);
        let t1 = t0.elapsed();
        let mut g = loss.backward();
        let t2 = t0.elapsed();
        let g = take_gradients(&model, &mut g);
        model = opt.step(model, g, Schedule { lr_multiplier: 1.0, muon_momentum: 0.9, weight_decay: 0.1 });
        println!(
            "fwd {:?} bwd {:?} opt {:?} total {:?} loss {}",
            t1,
            t2 - t1,
            t0.elapsed() - t2,
            t0.elapsed(),
            loss.into_scalar::<f32>()
        );
    }
}
