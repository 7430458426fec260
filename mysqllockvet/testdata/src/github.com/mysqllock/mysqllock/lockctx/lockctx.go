// Package lockctx has the names of the real one, for the tests.
package lockctx

import (
	"context"
	"time"
)

type Option func(*int)

func With(ctx context.Context, key string, opts ...Option) context.Context        { return ctx }
func WithKeys(ctx context.Context, keys []string, opts ...Option) context.Context { return ctx }
func Claim(ctx context.Context, opts ...Option) context.Context                   { return ctx }
func Without(ctx context.Context) context.Context                                 { return ctx }
func Row() Option                                                                 { return nil }
func Lease(ttl time.Duration) Option                                              { return nil }
func Advisory() Option                                                            { return nil }
func Optimistic() Option                                                          { return nil }
func IfVersion(version uint64) Option                                             { return nil }
func Shared() Option                                                              { return nil }
func Slots(n int) Option                                                          { return nil }
func ForUpdate() Option                                                           { return nil }
func ForShare() Option                                                            { return nil }
func SkipLocked() Option                                                          { return nil }
func MinHold(d time.Duration) Option                                              { return nil }
func MaxHold(d time.Duration) Option                                              { return nil }
func NoWait() Option                                                              { return nil }
func Wait(d time.Duration) Option                                                 { return nil }
func Retry(n int) Option                                                          { return nil }
func AllowStale() Option                                                          { return nil }
