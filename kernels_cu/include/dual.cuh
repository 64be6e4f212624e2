// Number types of score expressions: `Real`, and for the backward `Dual`, a value with its derivative (forward-mode
// automatic differentiation: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3).
#pragma once
#include <ptx.cuh>  // the CPU backend has its own

#ifndef REAL
#define REAL float  // the host computes the reference in double
#endif
using Real = REAL;

// A value and its derivative with respect to one variable. Real operands are constants: their derivative is 0.
struct Dual {
    Real value, derivative;

    __device__ __forceinline__ Dual() : value(0), derivative(0) {}
    __device__ __forceinline__ Dual(Real value, Real derivative = 0) : value(value), derivative(derivative) {}
};

#define DUAL_FN __device__ __forceinline__
DUAL_FN Dual operator+(Dual a) { return a; }
DUAL_FN Dual operator-(Dual a) { return {-a.value, -a.derivative}; }
DUAL_FN Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.derivative + b.derivative}; }
DUAL_FN Dual operator+(Dual a, Real b) { return {a.value + b, a.derivative}; }
DUAL_FN Dual operator+(Real a, Dual b) { return {a + b.value, b.derivative}; }
DUAL_FN Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.derivative - b.derivative}; }
DUAL_FN Dual operator-(Dual a, Real b) { return {a.value - b, a.derivative}; }
DUAL_FN Dual operator-(Real a, Dual b) { return {a - b.value, -b.derivative}; }
DUAL_FN Dual operator*(Dual a, Dual b) { return {a.value * b.value, a.derivative * b.value + a.value * b.derivative}; }
DUAL_FN Dual operator*(Dual a, Real b) { return {a.value * b, a.derivative * b}; }
DUAL_FN Dual operator*(Real a, Dual b) { return {a * b.value, a * b.derivative}; }
DUAL_FN Dual operator/(Dual a, Dual b) {
    const Real quotient = a.value / b.value;
    return {quotient, (a.derivative - quotient * b.derivative) / b.value};
}
DUAL_FN Dual operator/(Dual a, Real b) { return {a.value / b, a.derivative / b}; }
DUAL_FN Dual operator/(Real a, Dual b) {
    const Real quotient = a / b.value;
    return {quotient, -quotient * b.derivative / b.value};
}
#define COMPARE(op)                                                         \
    DUAL_FN bool operator op(Dual a, Dual b) { return a.value op b.value; } \
    DUAL_FN bool operator op(Dual a, Real b) { return a.value op b; }       \
    DUAL_FN bool operator op(Real a, Dual b) { return a op b.value; }
COMPARE(<)
COMPARE(<=)
COMPARE(>)
COMPARE(>=)
COMPARE(==)
COMPARE(!=)
#undef COMPARE

// The functions that an expression may call, for integers, Real and Dual. The namespace hides other functions of these
// names.
namespace expression {

#if defined(DTYPE_float32)
DUAL_FN Real exp(Real x) { return sizeof(Real) == 4 ? Real(::expf(float(x))) : Real(::exp(double(x))); }
DUAL_FN Real log(Real x) { return sizeof(Real) == 4 ? Real(::logf(float(x))) : Real(::log(double(x))); }
DUAL_FN Real tanh(Real x) { return sizeof(Real) == 4 ? Real(::tanhf(float(x))) : Real(::tanh(double(x))); }
#else  // one or two instructions of the special function unit: accurate enough for 16-bit inputs
DUAL_FN Real exp(Real x) { return ex2(1.4426950408889634f * x); }
DUAL_FN Real log(Real x) { return __logf(x); }
#if defined(DTYPE_bfloat16)
DUAL_FN Real tanh(Real x) { return tanh_approx(x); }  // relative error 2^-11; that of a bfloat16: 2^-8
constexpr bool TANH_IS_ONE_INSTRUCTION = true;
#else
DUAL_FN Real tanh(Real x) { return 1.0f - __fdividef(2.0f, 1.0f + exp(2.0f * x)); }  // error 2^-22
constexpr bool TANH_IS_ONE_INSTRUCTION = false;
#endif
#endif
DUAL_FN Dual exp(Dual x) {
    const Real y = exp(x.value);
    return {y, y * x.derivative};
}
DUAL_FN Dual log(Dual x) { return {log(x.value), x.derivative / x.value}; }
DUAL_FN Dual tanh(Dual x) {
    const Real y = tanh(x.value);
    return {y, (1 - y * y) * x.derivative};
}
template <class A>
DUAL_FN A abs(A x) {
    return x < 0 ? -x : x;
}
template <class A, class B>
DUAL_FN auto min(A a, B b) -> decltype(a + b) {
    return b < a ? decltype(a + b)(b) : decltype(a + b)(a);
}
template <class A, class B>
DUAL_FN auto max(A a, B b) -> decltype(a + b) {
    return a < b ? decltype(a + b)(b) : decltype(a + b)(a);
}
template <class A, class B>
DUAL_FN auto where(bool condition, A a, B b) -> decltype(a + b) {
    return condition ? decltype(a + b)(a) : decltype(a + b)(b);
}

}  // namespace expression
#undef DUAL_FN
