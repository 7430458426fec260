// Package errgroup has the names of the real one, for the tests.
package errgroup

import "context"

type Group struct{}

func WithContext(ctx context.Context) (*Group, context.Context) { return nil, ctx }
func (*Group) Go(f func() error)                                {}
func (*Group) Wait() error                                      { return nil }
