// The export table: sizes and kinds of the arguments come from the kernel's own signature.
#pragma once

template <class T>
constexpr char host_kind() {
  using U = std::remove_cv_t<T>;
  if (std::is_void_v<U>) return 'v';
  if (std::is_pointer_v<U>) return 'p';
  if (std::is_floating_point_v<U>) return 'f';
  if (!std::is_integral_v<U>) return 's';
  return std::is_signed_v<U> ? 'i' : 'u';
}
template <class T>
constexpr unsigned host_size() {
  if constexpr (std::is_void_v<T>) return 0;
  else return sizeof(T);
}
template <class T>
constexpr HostParameter host_parameter() {
  if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_pointer_t<T>;
    return {sizeof(T), 'p', host_size<Pointee>(), host_kind<Pointee>()};
  } else {
    return {sizeof(T), host_kind<T>(), 0, 0};
  }
}

template <auto Kernel>
struct HostEntry;
template <class... Args, void (*Kernel)(Args...)>
struct HostEntry<Kernel> {
  static constexpr unsigned num_parameters = sizeof...(Args);
  static constexpr HostParameter parameters[sizeof...(Args) + 1] = {host_parameter<std::remove_cv_t<Args>>()..., {}};
  template <size_t... I>
  HOST_UNSEEN static void unpack(void** args, std::index_sequence<I...>) {
    Kernel(*(std::remove_cv_t<Args>*)args[I]...);
  }
  HOST_UNSEEN static void call(void** args) { unpack(args, std::index_sequence_for<Args...>{}); }
};

// `id` makes the symbol, `name` is for messages; the rest is the kernel or a template instance of one.
#define HOST_EXPORT(id, name, ...)                                                            \
  extern "C" __attribute__((visibility("default"))) const HostKernel host_kernel_##id;        \
  const HostKernel host_kernel_##id = {name, HostEntry<__VA_ARGS__>::call,                    \
                                       HostEntry<__VA_ARGS__>::num_parameters, HostEntry<__VA_ARGS__>::parameters};
